"""What to sample and how drafts are verified."""
