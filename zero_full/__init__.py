"""The production package. Its first part has not landed yet, so there is nothing to import here."""
