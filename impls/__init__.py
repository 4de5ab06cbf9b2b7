"""What is computed, and by whom: the problem, the contract, the oracle and every implementation."""
