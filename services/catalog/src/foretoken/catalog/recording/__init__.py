"""Batches in, receipts out."""
