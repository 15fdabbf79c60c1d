//! Drops groups, the user and capabilities, and prevents regaining them.
//!
//! The kernel keeps all of this per thread. It is done while there is only one thread, and threads
//! started later inherit it.

use anyhow::{Context, ensure};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, getgid, getuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, capabilities,
    clear_ambient_capability_set, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::config::User;

/// Switches to a user without supplementary groups. Capabilities stay until they are dropped.
pub(crate) fn change(user: User) -> anyhow::Result<()> {
    if (getuid().as_raw(), getgid().as_raw()) == (user.user, user.group)
        && !has_capability(CapabilitySet::SETGID)
    {
        return Ok(());
    }
    ensure!(
        has_capability(CapabilitySet::SETUID) && has_capability(CapabilitySet::SETGID),
        "{}",
        cannot_change(user, getuid().as_raw())
    );
    let (uid, gid) = (Uid::from_raw(user.user), Gid::from_raw(user.group));
    set_thread_groups(&[]).context("no groups")?;
    set_thread_res_gid(gid, gid, gid).with_context(|| format!("group {}", user.group))?;
    set_thread_res_uid(uid, uid, uid).with_context(|| format!("user {}", user.user))
}

/// The message if this user may not switch to another one. Root may have lost the capabilities for
/// it.
fn cannot_change(user: User, current: u32) -> String {
    let out = match current {
        0 => "give it the capabilities SETUID and SETGID, which it lost (--cap-add SETUID,SETGID)",
        _ => "start it as root, or as that user",
    };
    format!("user={user}: user {current} may not switch to another user: {out}")
}

fn has_capability(what: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(what))
}

/// Prevents programs that this process starts from regaining capabilities. Must run first, because
/// it needs a capability itself.
pub(crate) fn prevent_regaining(keep: CapabilitySet) -> anyhow::Result<()> {
    clear_ambient_capability_set().context("ambient capabilities")?;
    if !has_capability(CapabilitySet::SETPCAP) {
        // The jail cannot execute programs, so a set-uid program cannot help an attacker.
        return Ok(());
    }
    close_bounding_set(keep)?;
    type Bits = CapabilitiesSecureBits;
    let bits = Bits::NO_ROOT
        | Bits::NO_ROOT_LOCKED
        | Bits::NO_SETUID_FIXUP
        | Bits::NO_SETUID_FIXUP_LOCKED
        | Bits::KEEP_CAPS_LOCKED
        | Bits::NO_CAP_AMBIENT_RAISE
        | Bits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(bits).context("secure bits")
}

/// Removes all capabilities but `keep` from the bounding set, if the process may.
fn close_bounding_set(keep: CapabilitySet) -> anyhow::Result<()> {
    if !has_capability(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if keep.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // The number is above the last capability of this kernel.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error).with_context(|| format!("capability {number}")),
        }
    }
    Ok(())
}

/// Drops all capabilities but `keep`, and prevents regaining them.
pub(crate) fn drop_capabilities(keep: CapabilitySet) -> anyhow::Result<()> {
    let mut sets = capabilities(None).context("capabilities")?;
    for set in [&mut sets.effective, &mut sets.permitted] {
        *set &= keep;
    }
    let sets = CapabilitySets { inheritable: CapabilitySet::empty(), ..sets };
    set_capabilities(None, sets).context("capabilities")?;
    set_no_new_privs(true).context("no new privileges")
}

/// Keeps only these capabilities, as far as the process has them, for this thread and for programs
/// that it starts, whatever user they run as.
pub fn keep_for_programs(keep: CapabilitySet) -> anyhow::Result<()> {
    close_bounding_set(keep)?;
    let mut sets = capabilities(None).context("capabilities")?;
    let kept = sets.permitted & keep;
    sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
    set_capabilities(None, sets).context("capabilities")?;
    clear_ambient_capability_set().context("ambient capabilities")?;
    for right in kept.iter() {
        configure_capability_in_ambient_set(right, true).context("ambient capabilities")?;
    }
    set_no_new_privs(true).context("no new privileges")
}

/// Prevents other processes of this user from reading this process' memory, and disables core
/// dumps.
pub fn protect_memory() -> anyhow::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("not dumpable")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn advice_names_the_capabilities_that_root_lacks() {
        let user = User { user: 10001, group: 10001 };
        let (root, other) = (cannot_change(user, 0), cannot_change(user, 1000));
        assert!(root.contains("--cap-add SETUID,SETGID") && !root.contains("as root"), "{root}");
        assert!(other.ends_with("start it as root, or as that user"), "{other}");
    }
}
