"""Slabs in device memory that other processes map, and doorbells between devices. Nothing is imported here."""
