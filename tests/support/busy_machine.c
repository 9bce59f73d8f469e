// Replaces getloadavg(): the machine seems to run 1000 processes.
int getloadavg(double averages[], int count) {
  for (int i = 0; i < count; ++i) averages[i] = 1000;
  return count;
}
