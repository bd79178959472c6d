"""The cost model: predicts the times of int8 and float on this machine from tables of measured
times."""
