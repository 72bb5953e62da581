// The text of cake_gdn_problem.plan: "key=value", several of them separated by commas.
#include <charconv>
#include <string>
#include <string_view>

#include "plan/plan.hpp"

namespace cake_gdn::plan {

namespace {

[[noreturn]] void reject(std::string_view came, const char *allowed) {
    throw InvalidPlan("plan has \"" + std::string(came.substr(0, 60)) + "\"; it must be " + allowed);
}

// A segment length in chunks.
int64_t segment_pin(std::string_view pin, std::string_view value) {
    if (value == "whole") return kWholeSequences;
    int64_t chunks = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), chunks);
    if (error != std::errc() || end != value.data() + value.size() || chunks < 1 || chunks > kWholeSequences) {
        reject(pin, "segment=whole or segment=CHUNKS with 1 to 2147483647 chunks of 64 tokens");
    }
    return chunks;
}

Pins::Tail tail_pin(std::string_view pin, std::string_view value) {
    if (value == "fused") return Pins::Tail::kFused;
    if (value == "separate") return Pins::Tail::kSeparate;
    reject(pin, "tail=fused or tail=separate");
}

}  // namespace

Pins parse_pins(const char *text) {
    Pins pins;
    if (text == nullptr) return pins;
    std::string_view rest(text);
    for (;;) {
        const size_t comma = rest.find(',');
        const std::string_view pin = rest.substr(0, comma);
        const size_t equals = pin.find('=');
        const std::string_view key = pin.substr(0, equals);
        if (equals == pin.npos || (key != "segment" && key != "tail")) {
            reject(pin, "KEY=VALUE[,KEY=VALUE...], with the keys segment and tail");
        }
        if (key == "segment" ? pins.segment_chunks != 0 : pins.tail != Pins::Tail::kAny) {
            reject(pin, "given once for each key");
        }
        const std::string_view value = pin.substr(equals + 1);
        if (key == "segment") {
            pins.segment_chunks = segment_pin(pin, value);
        } else {
            pins.tail = tail_pin(pin, value);
        }
        if (comma == rest.npos) return pins;
        rest.remove_prefix(comma + 1);
    }
}

}  // namespace cake_gdn::plan
