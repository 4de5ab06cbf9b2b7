"""``python -m harness``: the same as the console script ``splitkv``."""

from harness.cli import main

if __name__ == "__main__":
    main()
