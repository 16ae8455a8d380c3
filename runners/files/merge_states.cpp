// Answers the merge_states questions of an export: reads and writes safetensors files, depends on nothing.
// c++ -std=c++17 -O1 merge_states.cpp -o merge_states && ./merge_states DIR && shardcheck judge DIR
// With -DBUG it takes natural LSEs for base-2 ones, which `judge` must notice.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace fs = std::filesystem;

struct Tensor {
    std::string dtype;
    std::vector<size_t> shape;
    std::vector<char> bytes;
    size_t width() const { return dtype == "F32" ? 4 : 2; }
    size_t size() const { return bytes.size() / width(); }
    float at(size_t i) const {
        uint32_t bits = 0;
        if (dtype == "F32") std::memcpy(&bits, &bytes[4 * i], 4);
        else { std::memcpy(&bits, &bytes[2 * i], 2); bits <<= 16; }  // BF16: the upper half of an f32
        float value; std::memcpy(&value, &bits, 4); return value;
    }
    void set(size_t i, float value) {
        uint32_t bits; std::memcpy(&bits, &value, 4);
        if (dtype == "F32") { std::memcpy(&bytes[4 * i], &bits, 4); return; }
        bits = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // nearest, ties to even
        std::memcpy(&bytes[2 * i], &bits, 2);
    }
};
using Tensors = std::map<std::string, Tensor>;

// The header is {"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...}: only what stands there is read.
Tensors read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> all((std::istreambuf_iterator<char>(file)), {});
    uint64_t length = 0;
    if (all.size() < 8) throw std::runtime_error(path.string() + " is too short");
    std::memcpy(&length, all.data(), 8);
    if (length > all.size() - 8) throw std::runtime_error(path.string() + " is truncated");
    const std::string text(all.data() + 8, length);
    auto numbers = [&](const std::string& key, size_t from) {
        std::vector<size_t> list;
        size_t at = text.find('[', text.find('"' + key + '"', from)) + 1;
        while (text[at] != ']') {
            size_t used = 0;
            list.push_back(std::stoull(text.substr(at), &used));
            at += used + (text[at + used] == ',');
        }
        return list;
    };
    Tensors tensors;
    for (size_t at = text.find("\"dtype\""); at != std::string::npos; at = text.find("\"dtype\"", at + 1)) {
        size_t brace = text.rfind('{', at), close = text.rfind('"', brace), open = text.rfind('"', close - 1);
        size_t quote = text.find('"', text.find(':', at)) + 1;
        auto where = numbers("data_offsets", brace);
        const char* data = all.data() + 8 + length;
        Tensor tensor{text.substr(quote, text.find('"', quote) - quote), numbers("shape", brace), {}};
        if (8 + length + where[1] > all.size()) throw std::runtime_error(path.string() + " is truncated");
        tensor.bytes.assign(data + where[0], data + where[1]);
        tensors[text.substr(open + 1, close - open - 1)] = tensor;
    }
    return tensors;
}

void write(const fs::path& path, const Tensors& tensors) {
    std::string header = "{", data;
    for (const auto& [name, tensor] : tensors) {
        header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[";
        for (size_t i = 0; i < tensor.shape.size(); i++) header += (i ? "," : "") + std::to_string(tensor.shape[i]);
        header += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
        data.append(tensor.bytes.data(), tensor.bytes.size());
        header += std::to_string(data.size()) + "]}";
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    uint64_t length = header.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<char*>(&length), 8) << header << data;
}

Tensor like(const Tensor& model) {  // one rank: [1, T, H, D]
    Tensor tensor = model;
    tensor.shape.insert(tensor.shape.begin(), 1);
    return tensor;
}

int main(int, char** arguments) {
    size_t answered = 0;
    for (const auto& entry : fs::directory_iterator(arguments[1])) {
        const fs::path step = entry.path() / "step0";
        if (!fs::exists(step / "inputs.safetensors")) continue;
        Tensors in = read(step / "inputs.safetensors");
        if (!in.count("prefix_out")) continue;  // another operation
        const Tensor &po = in["prefix_out"], &pl = in["prefix_lse"], &so = in["suffix_out"], &sl = in["suffix_lse"];
        Tensor out = like(po), lse = like(pl);
        const size_t dim = po.size() / pl.size();
        const double none = -std::numeric_limits<double>::infinity();
        for (size_t i = 0; i < pl.size(); i++) {
            double a = std::isfinite(pl.at(i)) ? pl.at(i) : none, b = std::isfinite(sl.at(i)) ? sl.at(i) : none;
            double most = std::max(a, b);
#ifdef BUG
            auto weigh = [&](double l) { return l == none ? 0.0 : std::exp2(l - most); };
#else
            auto weigh = [&](double l) { return l == none ? 0.0 : std::exp(l - most); };
#endif
            double wa = weigh(a), wb = weigh(b), sum = wa + wb;
            lse.set(i, static_cast<float>(sum > 0 ? most + std::log(sum) : none));
            for (size_t d = 0; d < dim; d++) {  // an empty state may hold NaN: it is left out, not multiplied by zero
                double value = (wa > 0 ? wa * po.at(i * dim + d) : 0.0) + (wb > 0 ? wb * so.at(i * dim + d) : 0.0);
                out.set(i * dim + d, static_cast<float>(sum > 0 ? value / sum : 0.0));
            }
        }
        write(step / "outputs.safetensors", {{"out", out}, {"lse", lse}});
        answered++;
    }
    std::cout << "answered " << answered << " cases\n";
}
