// All that includes torch, as one translation unit: reading its headers takes longer than compiling the rest.
#include "attention.cpp"
#include "bindings.cpp"
#include "dispatch.cpp"
#include "encoder.cpp"
#include "exchange.cpp"
#include "layer.cpp"
#include "products.cpp"
