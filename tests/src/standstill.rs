//! The host's activity while a guest makes no progress: the threads that ran, and the expiry of
//! KVM's timers for the guest. It tells a waiting guest from a host that does not wake it.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

/// Messages of the host's kernel that are shown.
const MESSAGES: usize = 5;
const WATCHED: Duration = Duration::from_secs(2);
/// Fields of `/proc/PID/stat` after the name in parentheses: user and system time in ticks.
const TIMES: [usize; 2] = [11, 12];

/// The clock that the host's kernel uses.
const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";

/// Watches the host, and lists threads that ran, timer interrupts, and timers of guests.
#[must_use]
pub fn watch() -> String {
    let (before, interrupts) = (ticks(), timer_interrupts());
    sleep(WATCHED);
    let mut lines = vec![format!(
        "the host, watched for {WATCHED:?}: timer interrupts {interrupts} to {}",
        timer_interrupts()
    )];
    for (thread, after) in ticks() {
        let ran = after.saturating_sub(before.get(&thread).copied().unwrap_or(0));
        if ran > 0 {
            lines.push(format!("ran for {ran} ticks: {thread}"));
        }
    }
    lines.push(format!("its clock: {}", fs::read_to_string(CLOCK).unwrap_or_default().trim()));
    lines.extend(clock_messages());
    let timers = fs::read_to_string("/proc/timer_list").unwrap_or_default();
    lines.extend(guest_timers(&timers));
    lines.join("\n")
}

/// The run time in ticks of each thread on the host, by name and IDs.
fn ticks() -> BTreeMap<String, u64> {
    let folders = |path: &str| fs::read_dir(path).into_iter().flatten().flatten();
    let mut found = BTreeMap::new();
    for process in folders("/proc").map(|it| it.path().join("task")) {
        for task in folders(&process.display().to_string()) {
            // The thread may have ended meanwhile.
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            let Some((name, fields)) = stat.rsplit_once(')') else { continue };
            let fields: Vec<_> = fields.split_whitespace().collect();
            let time = |at: usize| fields.get(at)?.parse::<u64>().ok();
            let ran = TIMES.into_iter().filter_map(time).sum();
            found.insert(format!("{name}) of {}", process.display()), ran);
        }
    }
    found
}

/// The last messages of the host's kernel, which may be about its clock.
fn clock_messages() -> Vec<String> {
    let output = Command::new("dmesg").output();
    let text = output.map(|it| String::from_utf8_lossy(&it.stdout).into_owned());
    let text = text.unwrap_or_default();
    let lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines[lines.len().saturating_sub(MESSAGES)..].to_vec()
}

fn timer_interrupts() -> String {
    let list = fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let line = list.lines().find_map(|line| line.trim().strip_prefix("LOC:"));
    line.unwrap_or_default().split_whitespace().take_while(|it| it.parse::<u64>().is_ok()).collect()
}

/// Lines of `/proc/timer_list` with the current time, the expiry of guests' local APIC timers, and
/// the next event of each processor.
fn guest_timers(list: &str) -> Vec<String> {
    let lines: Vec<_> = list.lines().map(str::trim).collect();
    let due = |pair: &[&str]| match pair {
        [timer, due] if timer.contains("apic_timer_fn") => Some(format!("{timer} {due}")),
        [line, _]
            if ["now at", ".next_event", "next_event:"].iter().any(|it| line.starts_with(it)) =>
        {
            Some((*line).to_owned())
        }
        _ => None,
    };
    lines.windows(2).filter_map(due).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_timer_list_is_cut_to_the_guests_timers() {
        let list = "now at 7 nsecs\n #0: <0>, tick, S:01\n # expires at 9-9 nsecs\n #1: <1>, \
                    apic_timer_fn, S:01\n # expires at 8-8 nsecs [in 1 to 1 nsecs]\n";
        let due = "#1: <1>, apic_timer_fn, S:01 # expires at 8-8 nsecs [in 1 to 1 nsecs]";
        assert_eq!(guest_timers(list), ["now at 7 nsecs", due]);
    }

    #[test]
    fn busy_threads_are_counted() {
        // Only threads of this process: others may end meanwhile, and take their ticks with them.
        let own = format!("of /proc/{}/task", std::process::id());
        let most = || {
            let ticks = ticks();
            ticks.iter().filter(|(thread, _)| thread.ends_with(&own)).map(|it| *it.1).max()
        };
        let (before, start) = (most(), std::time::Instant::now());
        while start.elapsed() < Duration::from_millis(200) || most() <= before {
            assert!(start.elapsed() < Duration::from_secs(60), "no tick in a minute");
        }
    }
}
