"""What every format is read with: files, arrays, vocabularies and checks."""
