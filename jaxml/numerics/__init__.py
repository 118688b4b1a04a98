"""Precision policy. (Loss scaling and quantized arrays come with the scale issue.)"""
