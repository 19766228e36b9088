#pragma once

namespace mtp::cuda {

constexpr int kPieceDepth = 32;  // elements of a weight row that four lanes bring at a time, 16 bytes each

}  // namespace mtp::cuda
