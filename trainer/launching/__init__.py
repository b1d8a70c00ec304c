"""What trainer.launch is made of: pure decisions apart from the loop that acts on them."""
