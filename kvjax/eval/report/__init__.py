"""Reports made of rows: tables, figures, one HTML page, the front."""
