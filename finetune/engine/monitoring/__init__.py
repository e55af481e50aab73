"""What a run records of itself: per-rank figures, TensorBoard, progress lines, answers and start-up checks."""
