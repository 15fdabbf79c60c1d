//! The command line: one table of commands.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use crate::plan::Plan;
use crate::settings::Settings;
use crate::settings::environment::{self, Environment};
use crate::status::{Failure, Status};
use crate::{ask, help, plan, pod};

/// A command: its name, what follows, what it does, and how.
struct Verb {
    name: &'static str,
    usage: &'static str,
    help: &'static str,
    run: fn(&[String]) -> anyhow::Result<u8>,
}

const VERBS: &[Verb] = &[
    Verb {
        name: "pod",
        usage: "",
        help: "Runs the machine that the environment describes, until it is off or a signal says \
               to end. The image starts with this.",
        run: run_pod,
    },
    Verb {
        name: "plan",
        usage: "[--json]",
        help: "Reads the environment and shows what differs from the defaults, how large the \
               machine would be, what it would run, and what has no effect. The status is that \
               of what is wrong.",
        run: show_plan,
    },
    Verb {
        name: "status",
        usage: "",
        help: "How the machine of the pod is, as JSON.",
        run: show_status,
    },
    Verb {
        name: "shutdown",
        usage: "[--wait SECONDS]",
        help: "Asks the guest to shut down, as its power button does; with --wait, waits until it \
               is off.",
        run: shut_down,
    },
    Verb {
        name: "probe",
        usage: "[live|started|ready]",
        help: "Asks for the health of the pod, for exec probes: the status is 0 for yes. Without a \
               word: whether the guest is ready for those who come to use it.",
        run: probe,
    },
    Verb {
        name: "doctor",
        usage: "[--json] [--net TAP]",
        help: "Tells what this host can run, and how fast its volume is.",
        run: doctor,
    },
    Verb {
        name: "screenshot",
        usage: "FILE.png",
        help: "Writes what the screen shows.",
        run: take_picture,
    },
    Verb {
        name: "password",
        usage: "",
        help: "Prints the password of the screen.",
        run: show_password,
    },
    Verb {
        name: "help",
        usage: "[COMMAND|env [--markdown]]",
        help: "Explains a command; `help env` lists the variables of the environment.",
        run: explain,
    },
    Verb { name: "version", usage: "", help: "Prints the version.", run: version },
];

/// Does what the words of the command line say. The number is the exit status.
///
/// # Errors
///
/// When they make no sense, or what they ask for fails.
pub fn obey(words: Vec<OsString>) -> anyhow::Result<u8> {
    let words = words.into_iter().map(|word| {
        word.into_string().map_err(|word| usage(format!("{} is not text", word.display())))
    });
    let mut words: Vec<_> = words.collect::<anyhow::Result<_>>()?;
    if words.is_empty() {
        return explain(&[]);
    }
    let name = match words.remove(0).as_str() {
        "-h" | "--help" => "help".to_owned(),
        "-V" | "--version" => "version".to_owned(),
        name => name.to_owned(),
    };
    let Some(verb) = VERBS.iter().find(|verb| verb.name == name) else {
        return Err(usage(format!("there is no command {name}: `transom help` lists them")));
    };
    if words.iter().any(|word| word == "--help" || word == "-h") {
        return explain(&[verb.name.to_owned()]);
    }
    (verb.run)(&words)
}

fn usage(sentence: impl Into<String>) -> anyhow::Error {
    Failure::new(Status::Usage, sentence)
}

/// Prints for the person, or the script, that asked. A reader that left is no error of ours.
fn print(text: &str) -> anyhow::Result<u8> {
    std::io::stdout().write_all(text.as_bytes()).ok();
    Ok(0)
}

fn run_pod(words: &[String]) -> anyhow::Result<u8> {
    if !words.is_empty() {
        return Err(usage(
            "pod takes no words: the environment says everything (transom help env)",
        ));
    }
    pod::run(&std::env::vars_os().collect())
}

fn show_status(words: &[String]) -> anyhow::Result<u8> {
    alone("status", words)?;
    print(&ask::status()?)
}

fn shut_down(words: &[String]) -> anyhow::Result<u8> {
    let wait = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => None,
        ["--wait", seconds] => {
            let number = seconds.parse().ok().map(Duration::from_secs);
            Some(number.ok_or_else(|| usage(format!("--wait {seconds}: give seconds")))?)
        }
        _ => return Err(usage("shutdown takes nothing but --wait SECONDS")),
    };
    ask::shutdown(wait)?;
    Ok(0)
}

fn probe(words: &[String]) -> anyhow::Result<u8> {
    let word = match words {
        [] => "ready",
        [word] => word.as_str(),
        _ => return Err(usage("probe takes one word: live, started or ready")),
    };
    let page = ask::PROBES.iter().find(|(name, _)| *name == word);
    let (_, page) = page.ok_or_else(|| usage(format!("there is no probe {word}")))?;
    print(&ask::probe(&settings()?, page)?)
}

fn doctor(words: &[String]) -> anyhow::Result<u8> {
    ask::doctor(&settings()?, words)
}

/// What the environment says.
fn settings() -> anyhow::Result<Settings> {
    Ok(environment::read(&std::env::vars_os().collect())?.settings)
}

fn take_picture(words: &[String]) -> anyhow::Result<u8> {
    let [path] = words else { return Err(usage("screenshot takes the name of a file")) };
    ask::screenshot(Path::new(path))?;
    Ok(0)
}

fn show_password(words: &[String]) -> anyhow::Result<u8> {
    alone("password", words)?;
    print(&ask::password()?)
}

fn alone(verb: &str, words: &[String]) -> anyhow::Result<()> {
    if words.is_empty() { Ok(()) } else { Err(usage(format!("{verb} takes no words"))) }
}

fn show_plan(words: &[String]) -> anyhow::Result<u8> {
    let json = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--json"] => true,
        _ => return Err(usage("plan takes nothing but --json")),
    };
    let environment: Environment = std::env::vars_os().collect();
    let plan = Plan::make(&environment, Path::new("/"));
    print(&if json { plan::json(&plan) } else { plan::text(&plan) })?;
    match plan {
        Ok(plan) => plan.missing().map_or(Ok(0), Err),
        Err(error) => Err(error),
    }
}

fn version(_: &[String]) -> anyhow::Result<u8> {
    print(concat!("transom ", env!("CARGO_PKG_VERSION"), "\n"))
}

fn explain(words: &[String]) -> anyhow::Result<u8> {
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => print(&overview()),
        ["env"] => print(&help::table(help::width())),
        ["env", "--markdown"] => print(&help::markdown()),
        [topic] => {
            let verb = VERBS.iter().find(|verb| verb.name == topic);
            let verb = verb.ok_or_else(|| usage(format!("there is no help on {topic}")))?;
            let call = format!("transom {} {}", verb.name, verb.usage);
            print(&format!("{}\n\n{}\n", call.trim_end(), verb.help))
        }
        _ => Err(usage("help takes one command, or env and --markdown")),
    }
}

fn overview() -> String {
    let mut text = String::from("transom: the entry point of the container.\n\n");
    for verb in VERBS {
        let call = format!("transom {} {}", verb.name, verb.usage);
        writeln!(text, "  {}\n      {}", call.trim_end(), verb.help).expect("a string takes all");
    }
    text
}
