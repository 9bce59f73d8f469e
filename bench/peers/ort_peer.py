"""ONNX Runtime as a peer: one-op models over memory that numpy owns."""

import onnxruntime
from onnx import TensorProto, helper

_TYPES = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32}


class Session:
    """A model of com.microsoft nodes. `inputs` and `outputs` name arrays whose shapes and dtypes the model takes."""

    def __init__(self, nodes, inputs, outputs, threads):
        def described(arrays):
            return [helper.make_tensor_value_info(name, _TYPES[array.dtype.name], array.shape) for name, array in arrays.items()]

        graph = helper.make_graph(nodes, "peer", described(inputs), described(outputs))
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        settings.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])

    def run_on(self, inputs, outputs):
        """A function that runs the model on these arrays, in place where an input and an output share memory."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        keep = (inputs, outputs)

        def run(session=self._session, binding=binding, keep=keep):
            session.run_with_iobinding(binding)

        return run


def node(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, domain="com.microsoft", **attributes)


def version():
    return onnxruntime.__version__
