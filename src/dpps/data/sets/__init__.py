"""The named data sets, a file each: where it is published, how its files are read, whom to cite."""
