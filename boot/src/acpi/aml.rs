//! AML that is encoded already, as a part of other AML.

use acpi_tables::{Aml, AmlSink};

/// Encoded AML. An empty value adds nothing.
pub(super) struct Bytes(pub(super) Vec<u8>);

pub(super) fn bytes(aml: &dyn Aml) -> Bytes {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    Bytes(bytes)
}

impl Aml for Bytes {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}
