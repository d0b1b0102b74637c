"""Protocol buffers by the few fields that are read of them: no generated code, and no dependence on who ships the schema."""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# message -> field -> (number, type); a type in a list where it is repeated; the name of a message where it is one.
Schema = Mapping[str, Mapping[str, tuple[int, Any]]]

UINT64 = "uint64"
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    int: _FIELD.TYPE_INT64,
    UINT64: _FIELD.TYPE_UINT64,
    bool: _FIELD.TYPE_BOOL,
    float: _FIELD.TYPE_DOUBLE,
    str: _FIELD.TYPE_STRING,
    bytes: _FIELD.TYPE_BYTES,
}


def message_class(package: str, schema: Schema, name: str) -> Any:
    """The class of one message of a schema. Fields that the schema lacks are kept unread. Call once for each `package`."""
    file = descriptor_pb2.FileDescriptorProto(name=f"jaxtrain_{package}.proto", package=f"jaxtrain.{package}", syntax="proto3")
    for message_name, fields in schema.items():
        made = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            repeated, kind = isinstance(kind, list), kind[0] if isinstance(kind, list) else kind
            label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
            part = made.field.add(name=field_name, number=number, label=label, type=_TYPES.get(kind, _FIELD.TYPE_MESSAGE))
            if kind not in _TYPES:
                part.type_name = f".jaxtrain.{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"jaxtrain.{package}.{name}"))
