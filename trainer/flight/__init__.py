"""Reads PyTorch's Flight Recorder dumps and tells who keeps a collective from ending. Standard library only."""
