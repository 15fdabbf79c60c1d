//! `_DSM` of a TPM: the physical presence interface (TCG PC Client Platform Physical Presence
//! Interface 1.3) and the memory clear interface (TCG Platform Reset Attack Mitigation 1.10). Both
//! leave requests for firmware in memory that outlives a reset, in QEMU's layout
//! (`docs/specs/tpm.rst`), which OVMF expects.

use std::ops::Range;

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Arg, BufferData, DeRefOf, Equal, Field, FieldAccessType, FieldEntry, FieldLockRule,
    FieldUpdateRule, GreaterEqual, If, Index, Local, Method, MethodCall, Name, OpRegion,
    OpRegionSpace, Package, Path, Return, Store, Uuid, ZERO,
};
use anyhow::{Context as _, Result};

use super::aml::{Bytes, bytes};
use crate::file::File;

/// The fw_cfg file that leads firmware to the memory.
const CONFIG_FILE: &str = "etc/tpm/config";
/// TPM 2.0, interface 1.3.
const CONFIG_VERSIONS: [u8; 2] = [2, 1];

const PRESENCE: &str = "3DDDFAA6-361B-4EB4-A424-8D10089D1653";
const MEMORY_CLEAR: &str = "376054ED-CC13-4675-901C-4756D7F2D45D";
const VERSION: &str = "1.3";
/// Functions 0 to 8; functions 0 and 1.
const PRESENCE_FUNCTIONS: [u8; 2] = [0xff, 0x01];
const MEMORY_FUNCTIONS: [u8; 1] = [0x03];

/// Offsets in the memory: the fields below, and the memory overwrite request.
const FIELDS: u64 = 0x100;
const OVERWRITE: u64 = 0x15a;
/// The first bytes hold what firmware allows of each operation.
const OPERATIONS: u16 = 0x100;
const ALLOWED: u8 = 7;
const ALLOWED_TO_FIRMWARE_ALONE: u8 = 1;
const BLOCKED: u8 = 2;

/// Results of functions 2 and 7.
const NOT_IMPLEMENTED: u8 = 1;
const REFUSED: u8 = 3;
/// Function 4: requests take effect after a reboot.
const REBOOT: u8 = 2;
/// Function 6: there is no choice of languages.
const NO_LANGUAGES: u8 = 3;

/// The file for firmware.
pub fn presence_file(memory: &Range<u64>) -> Result<File> {
    let address = u32::try_from(memory.start).context("the TPM's memory for requests")?;
    Ok(File::new(CONFIG_FILE, [&address.to_le_bytes()[..], &CONFIG_VERSIONS].concat()))
}

/// The objects of the TPM's node.
pub(super) fn presence(memory: &Range<u64>) -> Bytes {
    let zeros = [&ZERO as &dyn Aml; 3];
    let parts = [
        region("TPP1", memory.start, OPERATIONS.into()),
        fields("TPP1", &[("TPPF", 8 * usize::from(OPERATIONS))]),
        region("TPP2", memory.start + FIELDS, OVERWRITE - FIELDS),
        fields(
            "TPP2",
            &[("PPIN", 8), ("PPIP", 32), ("PPRP", 32), ("PPRQ", 32), ("PPRM", 32), ("LPPR", 32)],
        ),
        region("TPP3", memory.start + OVERWRITE, 1),
        fields("TPP3", &[("MOVV", 8)]),
        bytes(&Name::new("PAIR".into(), &Package::new(zeros[..2].to_vec()))),
        bytes(&Name::new("TRIP".into(), &Package::new(zeros.to_vec()))),
        allowed(),
        dsm(),
    ];
    Bytes(parts.into_iter().flat_map(|part| part.0).collect())
}

fn region(name: &str, start: u64, length: u64) -> Bytes {
    bytes(&OpRegion::new(name.into(), OpRegionSpace::SystemMemory, &start, &length))
}

/// Names and widths in bits of consecutive fields of a region.
fn fields(region: &str, names: &[(&str, usize)]) -> Bytes {
    let entry = |(name, bits): &(&str, usize)| {
        let mut letters = [0; 4];
        letters.copy_from_slice(name.as_bytes());
        FieldEntry::Named(letters, *bits)
    };
    bytes(&Field::new(
        region.into(),
        FieldAccessType::Byte,
        FieldLockRule::NoLock,
        FieldUpdateRule::Preserve,
        names.iter().map(entry).collect(),
    ))
}

/// `TPFN(operation)`: what firmware allows of an operation; 0 if it does not know it.
fn allowed() -> Bytes {
    let unknown = GreaterEqual::new(&Arg(0), &OPERATIONS);
    // A field of that width is read as a buffer.
    let all = bytes(&Store::new(&Local(0), &Path::new("TPPF")));
    let its = bytes(&DeRefOf::new(&Index::new(&ZERO, &Local(0), &Arg(0))));
    bytes(&Method::new(
        "TPFN".into(),
        1,
        true,
        vec![
            &If::new(&unknown, vec![&Return::new(&ZERO)]),
            &all,
            &And::new(&Local(1), &its, &ALLOWED),
            &Return::new(&Local(1)),
        ],
    ))
}

fn dsm() -> Bytes {
    let functions = [
        answer(0, &BufferData::new(PRESENCE_FUNCTIONS.to_vec())),
        answer(1, &VERSION),
        function(2, &[operation(), refuse(0, NOT_IMPLEMENTED), request(&bytes(&ZERO)), done()]),
        function(3, &pending()),
        answer(4, &REBOOT),
        function(5, &[put("TRIP", 1, "LPPR"), put("TRIP", 2, "PPRP"), package("TRIP")]),
        answer(6, &NO_LANGUAGES),
        function(7, &confirmed()),
        function(8, &[operation(), bytes(&Return::new(&Local(1)))]),
    ];
    let memory = [
        answer(0, &BufferData::new(MEMORY_FUNCTIONS.to_vec())),
        function(1, &[store("MOVV", &argument(0)), done()]),
    ];
    let section = |uuid: &str, parts: &[Bytes]| {
        let parts = parts.iter().map(|it| it as &dyn Aml).collect();
        bytes(&If::new(&Equal::new(&Arg(0), &Uuid::new(uuid)), parts))
    };
    let (presence, memory) = (section(PRESENCE, &functions), section(MEMORY_CLEAR, &memory));
    let unknown = bytes(&Return::new(&BufferData::new(vec![0])));
    bytes(&Method::new("_DSM".into(), 4, true, vec![&presence, &memory, &unknown]))
}

fn function(number: u8, parts: &[Bytes]) -> Bytes {
    let parts = parts.iter().map(|it| it as &dyn Aml).collect();
    bytes(&If::new(&Equal::new(&Arg(2), &number), parts))
}

/// A function that always returns the same.
fn answer(number: u8, value: &dyn Aml) -> Bytes {
    function(number, &[bytes(&Return::new(value))])
}

/// An element of the package with the function's arguments.
fn argument(at: u8) -> Bytes {
    bytes(&DeRefOf::new(&Index::new(&ZERO, &Arg(3), &at)))
}

/// The requested operation into `Local0`, and what firmware allows of it into `Local1`.
fn operation() -> Bytes {
    let operation = bytes(&Store::new(&Local(0), &argument(0)));
    let call = MethodCall::new("TPFN".into(), vec![&Local(0)]);
    let allowed = bytes(&Store::new(&Local(1), &call));
    Bytes([operation.0, allowed.0].concat())
}

fn refuse(allowed: u8, result: u8) -> Bytes {
    bytes(&If::new(&Equal::new(&Local(1), &allowed), vec![&Return::new(&result)]))
}

/// Leaves the operation with its parameter for firmware.
fn request(parameter: &Bytes) -> Bytes {
    Bytes([store("PPRQ", &Local(0)).0, store("PPRM", parameter).0].concat())
}

fn store(name: &str, value: &dyn Aml) -> Bytes {
    bytes(&Store::new(&Path::new(name), value))
}

fn done() -> Bytes {
    bytes(&Return::new(&ZERO))
}

fn package(name: &str) -> Bytes {
    bytes(&Return::new(&Path::new(name)))
}

fn put(package: &str, at: u8, field: &str) -> Bytes {
    let package = Path::new(package);
    let element = Index::new(&ZERO, &package, &at);
    bytes(&Store::new(&element, &Path::new(field)))
}

/// If the caller asked for this revision.
fn revision(number: u8, parts: &[Bytes]) -> Bytes {
    let parts = parts.iter().map(|it| it as &dyn Aml).collect();
    bytes(&If::new(&Equal::new(&Arg(1), &number), parts))
}

/// Function 3: the operation that waits, from revision 2 on with its parameter.
fn pending() -> [Bytes; 2] {
    [
        revision(1, &[put("PAIR", 1, "PPRQ"), package("PAIR")]),
        revision(2, &[put("TRIP", 1, "PPRQ"), put("TRIP", 2, "PPRM"), package("TRIP")]),
    ]
}

/// Function 7: a request that firmware may confirm with its user.
fn confirmed() -> [Bytes; 7] {
    [
        operation(),
        refuse(0, NOT_IMPLEMENTED),
        refuse(ALLOWED_TO_FIRMWARE_ALONE, NOT_IMPLEMENTED),
        refuse(BLOCKED, REFUSED),
        revision(1, &[request(&bytes(&ZERO))]),
        revision(2, &[request(&argument(1))]),
        done(),
    ]
}
