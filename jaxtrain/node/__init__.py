"""What measures or checks a machine: preflight, benchmarks, and calibration of a plan."""
