"""How it is measured: studies, inputs, checks, timing, records, reports and the command line."""
