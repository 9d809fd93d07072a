"""The in-tree backends: one folder each, none importing another."""
