"""The texts of the experiments, English and Chinese side by side; one file each, called as the experiment is."""
