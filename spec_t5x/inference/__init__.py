"""Resumable bulk inference: many inputs in, numbered shards of answers out."""
