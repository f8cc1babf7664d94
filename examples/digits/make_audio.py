"""Speak the ten digits in many voices and store the clips in `data/spoken_digits.npz`.

The file is in the repository, so running this is optional; it needs the Debian package `espeak-ng`. A voice is
one of espeak-ng's speaker variants with one accent of English; each voice says every digit several times, each
time at another speed and pitch. Clips are 8 kHz, cut to the sound, one byte a sample (mu-law, ITU-T G.711),
which keeps 600 of them under 3 MB. The voices held out for validation are chosen here, by name, so no variant
is in both splits. Refuses to run without `espeak-ng`, and to store a clip longer than `data.py` takes.

    python examples/digits/make_audio.py
"""

import argparse
import io
import random
import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

SAMPLE_RATE, LONGEST = 8000, 6144  # samples a second, samples in a clip at most: what data.py takes
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-gb-x-gbclan")
TRAIN_VARIANTS = (
    *("m1", "f1", "m2", "f2", "m4", "f4", "m5", "f5", "m7", "m8", "Alex", "Alicia", "Andy", "Annie", "Gene"),
    *("Lee", "Mario", "Michael", "linda", "john", "steph", "edward", "anika", "rob"),
)
HELD_OUT_VARIANTS = ("m3", "f3", "m6", "belinda", "victor", "shelby")


def speak(word: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    """The word as float samples in [-1, 1] at 8 kHz, shape (T,); speed in words a minute, pitch in 0..99."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    spoken = subprocess.run(command, check=True, capture_output=True).stdout
    # espeak-ng writes to a pipe, so the length in the header is a dummy: read to the end instead
    with wave.open(io.BytesIO(spoken)) as file:
        rate = file.getframerate()
        samples = np.frombuffer(file.readframes(len(spoken)), dtype="<i2").astype(np.float64)
    samples = resample_poly(samples, SAMPLE_RATE, rate)
    samples /= np.abs(samples).max()
    loud = np.flatnonzero(np.abs(samples) > 0.02)
    return samples[loud[0] : loud[-1] + 1]


def mu_law(samples: np.ndarray) -> np.ndarray:
    """Samples in [-1, 1] as one byte each, shape kept (the continuous form of ITU-T G.711, mu = 255)."""
    compressed = np.sign(samples) * np.log1p(255 * np.abs(samples)) / np.log(256)
    return np.round((compressed + 1) / 2 * 255).astype(np.uint8)


def main() -> None:
    """Write the archive; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Speak the digits with espeak-ng.")
    parser.add_argument("--takes", type=int, default=2, help="clips of each digit by each voice")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "data" / "spoken_digits.npz")
    options = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        parser.error("espeak-ng is not installed (Debian: apt-get install espeak-ng)")

    rng = random.Random(0)
    variants = TRAIN_VARIANTS + HELD_OUT_VARIANTS
    voices = [f"{ACCENTS[i % len(ACCENTS)]}+{variant}" for i, variant in enumerate(variants)]
    clips, digits, speakers = [], [], []
    for speaker, voice in enumerate(voices):
        for digit, word in enumerate(WORDS):
            for _ in range(options.takes):
                clip = speak(word, voice, speed=rng.randrange(130, 200), pitch=rng.randrange(25, 75))
                if len(clip) > LONGEST:
                    seconds, longest = len(clip) / SAMPLE_RATE, LONGEST / SAMPLE_RATE
                    parser.error(f"{voice}: {word!r} takes {seconds:.2f} s, at most {longest:.2f} s fit")
                clips.append(mu_law(clip))
                digits.append(digit)
                speakers.append(speaker)
    np.savez_compressed(
        options.output,
        samples=np.concatenate(clips),
        lengths=np.array([len(clip) for clip in clips], dtype=np.int32),
        digits=np.array(digits, dtype=np.int8),
        speakers=np.array(speakers, dtype=np.int16),
        voices=np.array(voices),
        held_out=np.array([variant in HELD_OUT_VARIANTS for variant in variants]),
    )
    print(f"{len(clips)} clips by {len(voices)} voices, {options.output.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
