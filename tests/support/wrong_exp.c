// A wrong exp for LD_PRELOAD: with it the results of the reference differ from the golden vectors.
double exp(double x) { return x < 0 ? 0.5 : 2; }
