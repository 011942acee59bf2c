"""Other tools' files, read strictly and within bounds."""
