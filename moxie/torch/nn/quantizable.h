// What convert.h can give a recipe to.
#pragma once

#include <string>

namespace moxie::nn {

class Quantizable {
 public:
  virtual ~Quantizable() = default;
  virtual const std::string& recipe() const = 0;
  // "bf16" turns quantization off. Refuses a recipe that there is none of.
  virtual void set_recipe(const std::string& recipe) = 0;
};

}  // namespace moxie::nn
