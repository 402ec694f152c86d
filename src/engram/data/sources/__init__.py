"""Data sets: CIFAR-100, the embedded set, ImageNet, a folder of class folders; downloads, decoded images on disk."""
