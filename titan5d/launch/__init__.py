"""Starting ranks, joining them into process groups, and ending them."""
