"""Offline work that a profile comes from: what differs from head to head, found on prompts."""
