"""What puts stallwatch beside vLLM, and the programs that write the generated part of it."""
