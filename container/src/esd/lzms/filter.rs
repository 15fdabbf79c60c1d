//! Makes addresses in x86 instructions relative again. The compressor made those absolute that it
//! found in code, so that calls of one function are equal bytes.
//!
//! Code is where two instructions with the same target are near each other.

/// Bytes at the end of a block that are never changed. Shorter blocks are not changed at all.
const TAIL: usize = 16;
/// Distance within which two instructions with the same target are code.
const NEAR: i64 = 65535;
/// Distance behind code within which addresses are changed, and that for calls, which are likely to
/// be found in other data.
const REACH: i64 = 1023;
const CALL_REACH: i64 = REACH / 2;
const ADDRESS: usize = 4;

pub(super) struct Filter {
    /// Where an instruction had a target with these low 16 bits.
    targets: Vec<i64>,
}

/// An instruction with an address: bytes before the address, and the reach.
struct Instruction {
    opcode: usize,
    reach: i64,
}

enum Found {
    Instruction(Instruction),
    /// A relative jump, which is never changed.
    Jump,
    Nothing,
}

impl Filter {
    pub(super) fn new() -> Self {
        Self { targets: vec![0; 1 << 16] }
    }

    pub(super) fn undo(&mut self, data: &mut [u8]) {
        if data.len() <= TAIL + 1 {
            return;
        }
        self.targets.fill(-NEAR - 1);
        let mut code = -REACH - 1;
        let end = data.len() - TAIL;
        let mut at = 1;
        while at < end {
            match find(&data[at..]) {
                Found::Nothing => at += 1,
                Found::Jump => at += 1 + ADDRESS,
                Found::Instruction(instruction) => {
                    let (code_at, next) = self.instruction(data, at, &instruction, code);
                    code = code_at;
                    at = next;
                }
            }
        }
    }

    /// Changes an instruction. Returns where code was found last, and the place behind it.
    fn instruction(
        &mut self,
        data: &mut [u8],
        at: usize,
        instruction: &Instruction,
        code: i64,
    ) -> (i64, usize) {
        let next = at + instruction.opcode + ADDRESS;
        let (Ok(here), Ok(last)) = (i64::try_from(at), i64::try_from(next - 1)) else {
            return (code, next);
        };
        let Some(field) = data[at + instruction.opcode..].first_chunk_mut::<ADDRESS>() else {
            return (code, next);
        };
        if here - code <= instruction.reach {
            let low = u32::try_from(at & 0xffff_ffff).unwrap_or(0);
            *field = u32::from_le_bytes(*field).wrapping_sub(low).to_le_bytes();
        }
        let target = at.wrapping_add(usize::from(u16::from_le_bytes([field[0], field[1]])));
        let seen = std::mem::replace(&mut self.targets[target & 0xffff], last);
        (if last - seen <= NEAR { last } else { code }, next)
    }
}

/// The instruction at the start of `data`, which has more than [`TAIL`] bytes.
fn find(data: &[u8]) -> Found {
    let opcode = |opcode| Found::Instruction(Instruction { opcode, reach: REACH });
    match data {
        // mov rax or rcx, [rip + …]
        [0x48, 0x8b, 0x05 | 0x0d, ..] => opcode(3),
        // lea …, [rip + …]
        [0x48 | 0x4c, 0x8d, modrm, ..] if modrm & 7 == 5 => opcode(3),
        // call …
        [0xe8, ..] => Found::Instruction(Instruction { opcode: 1, reach: CALL_REACH }),
        // jmp …
        [0xe9, ..] => Found::Jump,
        // lock add [rip + …], …
        [0xf0, 0x83, 0x05, ..] => opcode(3),
        // call [rip + …]
        [0xff, 0x15, ..] => opcode(2),
        _ => Found::Nothing,
    }
}
