"""What happens, in order. A flow reads as the paragraph a colleague would say aloud."""
