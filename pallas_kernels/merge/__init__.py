"""Joining partial attentions: the monoid every read ends in."""
