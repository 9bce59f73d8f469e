// An exp that is wrong, for LD_PRELOAD: what the reference computes with it does not agree with the golden vectors.
double exp(double x) { return x < 0 ? 0.5 : 2; }
