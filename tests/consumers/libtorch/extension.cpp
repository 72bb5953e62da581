// A libtorch extension that calls the library itself, without the package's Python layer: the forward and the backward
// of one dense float batch on the CPU.
#include <torch/extension.h>

#include <cake_gdn_det/cake_gdn_det.hpp>

namespace {

cake_gdn_tensor view(const torch::Tensor &x) {
    TORCH_CHECK(x.scalar_type() == torch::kFloat && x.device().is_cpu() && x.dim() <= 4, "a float CPU tensor");
    cake_gdn_tensor tensor = cake_gdn::strided(x.data_ptr(), CAKE_GDN_FP32, {});
    for (int64_t i = 0; i < x.dim(); ++i) tensor.stride[i] = x.stride(i);
    return tensor;
}

cake_gdn_problem problem(const torch::Tensor &q, const torch::Tensor &k, const torch::Tensor &v, const torch::Tensor &g,
                         const torch::Tensor &beta, double scale) {
    cake_gdn_problem p = cake_gdn::problem();
    p.num_threads = at::get_num_threads();
    p.scale = scale;
    p.B = p.N = q.size(0), p.T = q.size(1), p.H = q.size(2), p.HV = v.size(2), p.K = q.size(3), p.V = v.size(3);
    p.q = view(q), p.k = view(k), p.v = view(v), p.g = view(g), p.beta = view(beta);
    return p;
}

class Rule : public torch::autograd::Function<Rule> {
public:
    static torch::Tensor forward(torch::autograd::AutogradContext *context, torch::Tensor q, torch::Tensor k,
                                 torch::Tensor v, torch::Tensor g, torch::Tensor beta, double scale) {
        cake_gdn_problem p = problem(q, k, v, g, beta, scale);
        torch::Tensor o = torch::empty_like(v);
        p.o = view(o);
        cake_gdn::Workspace scratch;
        cake_gdn::forward(p, scratch);
        context->save_for_backward({q, k, v, g, beta});
        context->saved_data["scale"] = scale;
        return o;
    }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                   torch::autograd::variable_list gradients) {
        const auto saved = context->get_saved_variables();
        cake_gdn_problem p =
            problem(saved[0], saved[1], saved[2], saved[3], saved[4], context->saved_data["scale"].toDouble());
        torch::autograd::variable_list out;
        for (const torch::Tensor &x : saved) out.push_back(torch::empty_like(x));
        p.d_o = view(gradients[0]);
        p.dq = view(out[0]), p.dk = view(out[1]), p.dv = view(out[2]), p.dg = view(out[3]), p.dbeta = view(out[4]);
        cake_gdn::Workspace scratch;
        cake_gdn::backward(p, scratch);
        out.emplace_back();
        return out;
    }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("rule", [](torch::Tensor q, torch::Tensor k, torch::Tensor v, torch::Tensor g, torch::Tensor beta,
                     double scale) { return Rule::apply(q, k, v, g, beta, scale); });
}
