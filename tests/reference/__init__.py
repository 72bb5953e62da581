"""References for the tests: a float64 oracle, closed forms of every stage, and the cases that tests draw from."""
