"""Blocks that several methods share: heads with their training, losses, penalties, importance."""
