//! The state of a TPM that is on, for snapshots: swtpm hands it out and takes it back.
//!
//! A TPM 2.0 has two parts: the permanent one, which swtpm keeps in its folder, and the volatile
//! one, such as the PCRs. (A third, `PTM_BLOB_TYPE_SAVESTATE`, is only for a TPM 1.2.) swtpm writes
//! the permanent part to its folder at `INIT`, so a state that it refuses changes nothing there.
//! Part and flags are swtpm's own: a state that it encrypts in its folder is encrypted here, too.
//!
//! Threats: swtpm may name any length. A part has a limit, and is sent whole or not at all.

use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::{POWER_ON_TIMEOUT, Swtpm, receive, send, take};

/// `CMD_*` of the control channel.
const GET_STATEBLOB: u32 = 12;
const SET_STATEBLOB: u32 = 13;
/// `PTM_CAP_*` bits of these commands.
const NEEDED: u32 = 1 << 8 | 1 << 9;
/// `PTM_BLOB_TYPE_*`
const PERMANENT: u32 = 1;
const VOLATILE: u32 = 2;
/// `PTM_INIT_FLAG_DELETE_VOLATILE`: the volatile state is used once.
const DELETE_VOLATILE: u32 = 1;
/// In bytes, for each part. A TPM stores at most 128 KiB.
const MAX_PART: u32 = 256 << 10;
/// Time limit for both parts.
const SAVE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    permanent: Part,
    volatile: Part,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Part {
    /// `PTM_STATE_FLAG_*`, such as that it is encrypted.
    flags: u32,
    #[serde(with = "crate::hex")]
    bytes: Vec<u8>,
}

impl Swtpm {
    /// Whether the TPM was switched on, even if it failed then.
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Returns the state of the TPM, which goes on. No command may be running.
    pub fn save(&mut self) -> anyhow::Result<State> {
        ensure!(self.on && !self.broken, "the TPM has failed: restart the machine");
        self.can_move()?;
        let end = Instant::now() + SAVE_TIMEOUT;
        Ok(State { permanent: self.part(PERMANENT, end)?, volatile: self.part(VOLATILE, end)? })
    }

    fn can_move(&self) -> anyhow::Result<()> {
        ensure!(
            self.capabilities & NEEDED == NEEDED,
            "this swtpm neither hands its state out nor takes it back (its capabilities are \
             {:#x}): use a newer one, or shut the guest down instead",
            self.capabilities
        );
        Ok(())
    }

    fn part(&mut self, kind: u32, end: Instant) -> anyhow::Result<Part> {
        match self.get(kind, end) {
            Ok(Ok(part)) => Ok(part),
            Ok(Err(code)) => bail!(
                "swtpm does not hand out part {kind} of its state (error {code:#x}): shut the \
                 guest down instead"
            ),
            Err(error) => {
                let error = error.context(format!("part {kind} of its state"));
                self.give_up(&error);
                Err(error)
            }
        }
    }

    /// Returns swtpm's error code if it refuses. Fails if the connection cannot be used any more.
    fn get(&self, kind: u32, end: Instant) -> anyhow::Result<Result<Part, u32>> {
        // No flags, and from the first byte on.
        let message = [GET_STATEBLOB, 0, kind, 0].map(u32::to_be_bytes);
        send(&self.control, message.as_flattened(), end)?;
        let (mut result, mut fields) = ([0; 4], [[0; 4]; 3]);
        receive(&self.control, &mut result, end)?;
        let result = u32::from_be_bytes(result);
        if result != 0 {
            // An error comes alone or with fields, in a single write.
            take(&self.control, fields.as_flattened_mut())?;
            return Ok(Err(result));
        }
        receive(&self.control, fields.as_flattened_mut(), end)?;
        let [flags, total, length] = fields.map(u32::from_be_bytes);
        ensure!(
            total == length && (1..=MAX_PART).contains(&length),
            "it sends {length} of {total} bytes, and 1 to {MAX_PART} are valid"
        );
        let mut bytes = vec![0; usize::try_from(length)?];
        receive(&self.control, &mut bytes, end)?;
        Ok(Ok(Part { flags, bytes }))
    }

    /// Switches the TPM on with a saved state, which replaces its stored one.
    pub fn restore(&mut self, state: &State) -> anyhow::Result<()> {
        self.can_move()?;
        // Whatever comes of it, this swtpm is not for another machine.
        self.on = true;
        let end = Instant::now() + POWER_ON_TIMEOUT;
        self.switch_off(end)?;
        self.set(PERMANENT, &state.permanent, end)?;
        self.set(VOLATILE, &state.volatile, end)?;
        self.switch_on(DELETE_VOLATILE, end)
    }

    fn set(&self, kind: u32, part: &Part, end: Instant) -> anyhow::Result<()> {
        let length = u32::try_from(part.bytes.len()).ok().filter(|it| (1..=MAX_PART).contains(it));
        let length = length.with_context(|| {
            format!("part {kind} of the TPM's state has {} bytes", part.bytes.len())
        })?;
        let fields = [part.flags, kind, length].map(u32::to_be_bytes);
        let fields = [fields.as_flattened(), &part.bytes].concat();
        self.ask::<0>("SET_STATEBLOB", SET_STATEBLOB, &fields, end).map(drop).with_context(|| {
            format!(
                "swtpm does not take part {kind} of its state back: it needs the keys of the \
                 swtpm that saved it, and no older version"
            )
        })
    }
}
