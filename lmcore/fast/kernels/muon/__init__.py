"""What Muon does to every element, before and after its matmuls."""
