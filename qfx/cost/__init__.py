"""The predicted times of int8 and float on this machine, and the tables of measured times from
which they follow."""
