"""What speculation costs on this device, measured once and kept."""
