"""Linear attention: sums over keys in place of a softmax, in time O(L) and with a state of fixed size."""
