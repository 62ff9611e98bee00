"""Curriculum: which examples of an environment are visited, by how hard they have been so far."""
