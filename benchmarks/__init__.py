"""What this service must reach, measured: `python -m benchmarks NAME [--quick] [--only ID ...]`."""
