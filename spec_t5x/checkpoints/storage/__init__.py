"""Parts that all formats share: files, arrays, vocabularies and checks."""
