"""`pyctl doctor`: checks of this machine, each from facts to findings."""
