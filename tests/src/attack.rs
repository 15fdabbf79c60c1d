//! The module of `tests/firmware/attack.c`, with which the kernel of a guest attacks SMM.

/// The module in the guest.
pub const MODULE: &str = "/attack.ko";
/// The machine's memory. TSEG is its last 16 MiB.
pub const MEMORY: &str = "512M";
pub const TSEG: u64 = 0x1f00_0000;
/// Attempts, and their results when they have no effect.
pub const ATTEMPTS: &[(&str, &str)] = &[
    ("enable", "21"),
    ("commands", "done"),
    ("messages", "done"),
    ("timers", "refused"),
    ("controller", "refused"),
    ("deaf", "taken"),
];

/// The shell function `attack ATTEMPT [TSEG [PARAMETER]]`, which prints the module's result.
pub fn function() -> String {
    format!(
        "attack() {{
           dmesg -c > /dev/null
           insmod {MODULE} attempt=$1 tseg=${{2-{TSEG:#x}}} $3 && rmmod attack
           dmesg | sed -n 's/.*attack: result //p'
         }}
"
    )
}
