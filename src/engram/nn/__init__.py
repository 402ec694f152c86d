"""Networks: a backbone that gives feature maps and an embedding, and a head that grows."""
